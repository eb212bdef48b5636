"""What `pagedkv top` is made of: the connection to a server's live view, what is known of the run
by the frames that came, and the screen made of it.
"""
