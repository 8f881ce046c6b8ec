"""The routes: OpenAI's, Anthropic's and the server's own, with each route's request and answer in one file."""
