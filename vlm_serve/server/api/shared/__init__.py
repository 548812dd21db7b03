"""Parts that several APIs share: from a request's body to its task, from deltas to a response.

`request_body` reads the JSON into a model of `fields`, `sampling` and `chat_request`.
`conversation` makes it a task. `answer` turns the deltas into a stream or a whole response.
"""
