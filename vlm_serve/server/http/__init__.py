"""The HTTP layer, from the socket to a route, in the order of a request.

`serving` listens, and `connections` bound how slow clients may be. Then come layers: `root_path`,
`browsers` (other websites), `auth` (API keys and tenants), `static_page`, `request_memory` (the
budget). A route reads its `body`, passes `admission`, and answers as a stream (`streaming`) or with
one of the `errors`.
"""
