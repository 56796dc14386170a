// Before the first paint: the theme and the language that were chosen last time. Not a module, so that it runs at once.
try {
  const chosen = JSON.parse(localStorage.getItem("penjing.settings") || "{}");
  if (chosen.theme === "dark" || chosen.theme === "light") document.documentElement.dataset.theme = chosen.theme;
} catch {
  // No storage (a private window): the system's theme.
}
