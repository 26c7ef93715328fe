"""Users' places for input and output: files, objects and URLs, and how each is read and written."""
