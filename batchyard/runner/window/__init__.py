"""Requests in flight: what may be sent now, and what an answer means."""
