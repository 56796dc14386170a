// The words of the tab plan.

export const words = {
  en: {
    planSoon: "Not made yet.",
  },
  zh: {
    planSoon: "尚未完成。",
  },
};
