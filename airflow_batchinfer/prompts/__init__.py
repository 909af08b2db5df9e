"""From a row to a prompt: templates, chat messages, token ids, and what is done with over-long rows."""
