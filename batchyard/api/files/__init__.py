"""Routes of files and uploads."""
