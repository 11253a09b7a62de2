// The key of the API, kept for this tab only.
export function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { authorization: `Bearer ${key}` } : {};
}

export function element(kind, text, ...classes) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}
