"""Whether an answer is one of its task: asked by the worker of each, and by `validate` of those stored."""
