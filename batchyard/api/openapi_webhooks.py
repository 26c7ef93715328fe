"""Webhooks and deliveries in the API's description: their paths and their shapes."""

from __future__ import annotations

from typing import Any, Final

from batchyard.api.deliveries import DEFAULT_DELIVERIES, MOST_DELIVERIES
from batchyard.api.openapi_operations import operation, paging, path, query
from batchyard.api.webhook_endpoints import (
    DEFAULT_ENDPOINTS,
    MOST_ENDPOINTS,
    WebhookEndpoint,
    WebhookEndpointDeleted,
    WebhookEndpointTest,
    WebhookEndpointWithSecret,
    WebhookEventTypeList,
    WebhookSecret,
)
from batchyard.delivery.webhooks import Delivery, DeliveryWithAttempts
from batchyard.store import DeliveryStatus

Json = dict[str, Any]

WEBHOOK_STRUCTS: Final = (
    WebhookEndpoint,
    WebhookEndpointWithSecret,
    WebhookEndpointDeleted,
    WebhookEndpointTest,
    WebhookEventTypeList,
    WebhookSecret,
    Delivery,
    DeliveryWithAttempts,
)


def webhook_paths() -> Json:
    endpoint, delivery = path("webhook_endpoint_id"), path("delivery_id")
    return {
        "/v1/webhook_endpoints": {
            "post": operation(
                "createWebhookEndpoint",
                "Have a URL told of batches' ends",
                "WebhookEndpointWithSecret",
                body=True,
            ),
            "get": operation(
                "listWebhookEndpoints",
                "List webhook endpoints, the newest first",
                "WebhookEndpointList",
                *paging(MOST_ENDPOINTS, DEFAULT_ENDPOINTS),
            ),
        },
        "/v1/webhook_endpoints/{webhook_endpoint_id}": {
            "get": operation(
                "retrieveWebhookEndpoint", "Look at an endpoint", "WebhookEndpoint", endpoint
            ),
            "post": operation(
                "updateWebhookEndpoint",
                "Change an endpoint, and enable it again",
                "WebhookEndpoint",
                endpoint,
                body=True,
            ),
            "delete": operation(
                "deleteWebhookEndpoint", "Delete an endpoint", "WebhookEndpointDeleted", endpoint
            ),
        },
        "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": {
            "post": operation(
                "rotateWebhookEndpointSecret",
                "Make a new signing secret",
                "WebhookEndpointWithSecret",
                endpoint,
                body=True,
            )
        },
        "/v1/webhook_endpoints/{webhook_endpoint_id}/test": {
            "post": operation(
                "testWebhookEndpoint",
                "Send a sample event now",
                "WebhookEndpointTest",
                endpoint,
                body=True,
            )
        },
        "/v1/webhook_event_types": {
            "get": operation("listWebhookEventTypes", "List event types", "WebhookEventTypeList")
        },
        "/v1/webhook_secret": {
            "post": operation(
                "rotateWebhookSecret",
                "Make a new secret for the URLs that batches name themselves",
                "WebhookSecret",
                body=True,
            )
        },
        "/v1/deliveries": {
            "get": operation(
                "listDeliveries",
                "List deliveries, the newest first",
                "DeliveryList",
                query("batch_id", {"type": "string"}),
                query("webhook_endpoint_id", {"type": "string"}),
                query("status", {"type": "string", "enum": list(DeliveryStatus)}),
                *paging(MOST_DELIVERIES, DEFAULT_DELIVERIES),
            )
        },
        "/v1/deliveries/{delivery_id}": {
            "get": operation(
                "retrieveDelivery",
                "Look at a delivery and its attempts",
                "DeliveryWithAttempts",
                delivery,
            )
        },
        "/v1/deliveries/{delivery_id}/replay": {
            "post": operation(
                "replayDelivery",
                "Deliver it again, from the start",
                "Delivery",
                delivery,
                body=True,
                errors=("409",),
            )
        },
    }
