"""What a request line is: its form, its endpoint, its prompt, and what a client may write."""
