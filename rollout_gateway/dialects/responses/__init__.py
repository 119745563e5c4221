"""OpenAI's Responses API: `/v1/responses`, on the way of every chat, and stored responses."""
