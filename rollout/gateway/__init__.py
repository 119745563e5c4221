"""The HTTP gateway: OpenAI's, vLLM's and SGLang's dialects over clients of one worker or several.

endpoints   the table of all endpoints, from which the application is built
dialects    the bodies and handlers of the endpoints
prompts     from the fields of a request to token ids and sampling arguments
answers     from the tokens of a completion to what an answer shows
formats     formats of reasoning and tool calls in what a model writes
orders      what trainers order: pauses, sleep, adapters, weights
workers     requests to the workers, and what is known of them
http        connections, access, bodies, errors, streams of events
"""
