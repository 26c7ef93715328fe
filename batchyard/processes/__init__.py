"""Our own programs that run as child processes: how they are limited, asked and answered."""
