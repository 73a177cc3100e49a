"""A module per part of the navigation: handlers ask the API, the templates in web/templates show its answers."""
