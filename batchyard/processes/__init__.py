"""Work of one process and of its children: threads, turns, programs that end with their parent."""
