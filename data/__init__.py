"""Chats in, token ids and loss masks out; and chats made by the backbone itself where there are none.

- `chats`: files of chats to lists of messages
- `prepare`, `preview`: chats to ids and masks, and what they look like
- `groups`: work in fixed groups that resumes whole
- `synthesize`, `regenerate`: the backbone writes conversations, or answers given prompts
"""
