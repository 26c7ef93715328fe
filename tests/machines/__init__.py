"""Machines with a host name, a disk and settings of their own, on this one; they share TCP."""
