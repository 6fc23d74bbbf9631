/* Formulas stand in pages as \[ LaTeX \]; KaTeX is part of this site. */
for (const element of document.querySelectorAll(".arithmatex")) {
  const latex = element.textContent.trim().slice(2, -2);
  katex.render(latex, element, { displayMode: true, throwOnError: false });
}
