"""Chats in, token ids and loss masks out; and chats made by the backbone itself where there are none.

- `chats`: files of chats to lists of messages
- `masks`, `prepare`, `preview`: one chat to ids and mask; many of them to a folder; what they look like
- `groups`: work in fixed groups that resumes whole
- `synthesize`, `regenerate`: the backbone writes conversations, or answers given prompts
"""
