"""The HTTP API for OpenAI's SDKs: Files, Uploads, Batches, Webhooks. Routers translate."""
