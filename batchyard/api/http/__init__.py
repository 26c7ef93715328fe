"""HTTP for every route: bodies, errors, sessions and pages."""
