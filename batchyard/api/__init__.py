"""The HTTP API for OpenAI's SDKs: Files, Uploads, Batches. Routers translate; steps decide."""
