"""Routes of live requests and of responses."""
