"""From a row to what the engine is sent: templates, chat messages, tokens, over-long rows."""
