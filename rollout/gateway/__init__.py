"""The HTTP gateway: vLLM's and SGLang's dialects, and OpenAI's, over clients of one worker or several."""
