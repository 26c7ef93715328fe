// Our own: the page has no inline script.
SwaggerUIBundle({
  url: document.getElementById("swagger-ui").dataset.url,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
