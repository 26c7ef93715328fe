"""Engines that run already, wherever they are: servers that speak OpenAI's API."""
