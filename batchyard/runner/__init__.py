"""The engine's side: lease chunks, put their requests into one engine, store what comes back."""
