"""The page for browsers: HTML at ``/``, made on the server from Jinja2 templates."""
