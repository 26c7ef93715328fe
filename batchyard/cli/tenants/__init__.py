"""Commands for tenants, their keys and their webhooks."""
