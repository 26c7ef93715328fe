"""Tenants: their quotas, API keys, cache salts and idempotency keys."""
