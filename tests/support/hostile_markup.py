"""Texts that a page must show as texts: markup, scripts, templates and addresses."""

PAYLOADS = (
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned=1'>",
    "<svg onload=window.owned=1>",
    '"><script>window.owned=1</script>',
    "' onmouseover='window.owned=1",
    "</pre><script>window.owned=1</script>",
    "<iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "<a href='javascript:window.owned=1'>x</a>",
    "<style>body{display:none}</style>",
    "<base href='https://evil.invalid/'>",
    "<meta http-equiv=refresh content='0;url=https://evil.invalid'>",
    "<form action=https://evil.invalid><input autofocus onfocus=window.owned=1></form>",
    "${window.owned=1}",
    "{{constructor.constructor('window.owned=1')()}}",
    "</script><script>window.owned=1</script>",
    "<!--<img src=--><img src=x onerror=window.owned=1>//-->",
    "<math><mtext></p><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.owned=1&gt;'>",
    "<object data='data:text/html,<script>window.owned=1</script>'></object>",
    "\u2028window.owned=1\u2029",
    "<details open ontoggle=window.owned=1>",
)
"""Each sets `window.owned`, leaves the page, or hides it, if it is taken for markup."""
