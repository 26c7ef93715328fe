"""vLLM as a child process: its command line, its environment, its log and its line stream."""
