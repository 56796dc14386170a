// The words of the tab data.

export const words = {
  en: {
    dataSoon: "Not made yet.",
  },
  zh: {
    dataSoon: "尚未完成。",
  },
};
