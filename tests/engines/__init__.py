"""Real servers that people run beside vLLM: `make test-engines`, and what they were seen to say."""
