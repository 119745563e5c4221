"""The HTTP gateway: the dialects of OpenAI, Anthropic, Tinker, vLLM and SGLang over clients of workers.

endpoints   the table of all endpoints, from which the application is built
dialects    rows of that table with their bodies and handlers; no dialect imports another one
requests    one request on its way to the workers and back, for every dialect
history     the data that is kept between requests
prompts     turn the fields of a request into token ids and sampling arguments
answers     turn the tokens of a completion into the fields of an answer
formats     formats of reasoning and tool calls in what a model writes
orders      orders of trainers: pauses, sleep, adapters, weights
workers     requests to the workers, and their known status
http        connections, access, bodies, errors, streams of events
"""
