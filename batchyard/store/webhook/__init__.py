"""Webhook endpoints, and the secrets that their events are signed with."""
