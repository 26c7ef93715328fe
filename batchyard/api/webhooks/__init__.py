"""Routes of webhook endpoints and of what is delivered to them."""
