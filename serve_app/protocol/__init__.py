"""OpenAI's request and response shapes: pure pydantic and pure functions, no fastapi, no ray."""
