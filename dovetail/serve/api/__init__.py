"""The routes: OpenAI's, Anthropic's, and the server's own. A route's request is in `NAME_request.py` and its answer in
`NAME.py`, or both in one file where they are short."""
