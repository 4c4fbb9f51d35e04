"""The HTTP/1.1 server of all programs.

`messages` declares requests and responses, `connection` turns bytes into them and back (by h11) and carries
one client's exchange on asyncio, and `server` owns the thread, the listening sockets, and the table of open connections.
"""
