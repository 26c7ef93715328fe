"""Real services that tests start for themselves: no Docker, loopback only, gone afterwards."""
