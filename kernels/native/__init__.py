"""Compiled C++ for the CPU: built on the user's machine at first use, kept, always optional."""
