"""Chat templates: messages to segments (control tokens and plain text) to ids."""

from smollm2.template.messages import Message
from smollm2.template.template import DEFAULT_SYSTEM, SMOLLM2_TEMPLATE, ChatTemplate, System

__all__ = ["DEFAULT_SYSTEM", "SMOLLM2_TEMPLATE", "ChatTemplate", "Message", "System"]
