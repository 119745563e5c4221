"""The HTTP gateway: OpenAI's, vLLM's and SGLang's dialects over clients of one worker or several.

endpoints   the table of all endpoints, from which the application is built
dialects    the bodies and handlers of the endpoints
prompts     turn the fields of a request into token ids and sampling arguments
answers     turn the tokens of a completion into the fields of an answer
formats     formats of reasoning and tool calls in what a model writes
orders      orders of trainers: pauses, sleep, adapters, weights
workers     requests to the workers, and their known status
http        connections, access, bodies, errors, streams of events
"""
