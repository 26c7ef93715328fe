"""What a restored database or a clock that was set back requires."""
