"""What steps, runners, files and deliveries work with. It knows none of them."""
