"""Starting and stopping the server as a process: the standard library and configs only."""
