"""SGLang behind our engine protocol: servers in processes of their own, talked to by HTTP. Nothing imports sglang here;
only a server's own process does.
"""
