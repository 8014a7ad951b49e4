"""SGLang as inference engine: servers in processes of their own, used over HTTP.

Nothing in the actors imports sglang; only a server's process does.
"""
