"""Routes for operators: health, metrics, models and use."""
