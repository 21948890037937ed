"""Experiments beyond the lab; nothing else imports them."""
