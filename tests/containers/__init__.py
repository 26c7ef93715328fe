"""The images and the compose file: built, and run by podman, without an installation."""
